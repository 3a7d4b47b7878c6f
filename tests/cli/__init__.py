"""The command line, in this process where that will do and as a process where streams and signals matter."""
