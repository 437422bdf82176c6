"""A server with OpenAI's API over continuous decoding: ``python -m implicit_blocks serve``.

``command`` is the command line, ``app`` the HTTP application, ``engine`` the thread that decodes. Importing
this package imports neither torch nor the packages of the extra ``serve``.
"""
