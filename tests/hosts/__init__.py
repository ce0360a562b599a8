"""Whole clusters over isolated hosts: namespaces of their own for everything that processes of one machine share."""
