"""The backplane as a program for other programs: a host on stdio, a server of the Model Context Protocol."""
