"""Generation: prompts solved in one window, then token by token, each row as it would be alone."""
