"""Gemini CLI, which speaks the Agent Client Protocol (`agents.acp`) and writes more than that into a `record`."""
