"""The web console: HTML pages over the resources under /v1.

It shows their answers and makes their changes, with the credentials of the visitor, and can do nothing else.
"""
