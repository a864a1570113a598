"""The command line: parses arguments, calls the engine or the app, prints the result. No policy."""
