"""The command line, one file a verb. A verb parses, calls, prints."""
