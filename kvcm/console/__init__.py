"""The web console: pages for people who look rather than read.

It shows only what the resources under /v1 answer, and does only what they do, with the credentials of whoever looks.
"""
