"""The command line: parses, asks the engine or the app, prints. It decides nothing itself."""
