"""Serves other programs: as a host on stdin and stdout, and as a server of the Model Context Protocol."""
