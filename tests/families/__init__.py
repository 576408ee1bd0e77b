"""Every model family with an expert plan: is it loaded, trained and saved as plain Transformers does? One command."""
