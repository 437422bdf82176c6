"""A plugin with a missing dependency."""

import acme_dependency_that_is_not_installed  # noqa: F401  # the missing dependency
