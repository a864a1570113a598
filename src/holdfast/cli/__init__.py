"""The command line: parses arguments, calls the engine or the app, prints the result. It contains no policy."""
