"""Reader of Gemini CLI's own files, which have more than its messages; `agents.acp` drives the program."""
