"""Commands of a command: `simulate sweep`."""
