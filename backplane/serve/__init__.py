"""Backplane as a program for other programs: a host on stdio, and a server of the Model Context Protocol."""
