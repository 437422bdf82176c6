"""A plugin whose own dependency is not installed."""

import acme_dependency_that_is_not_installed  # noqa: F401  # the point of it
