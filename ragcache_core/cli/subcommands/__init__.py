"""Commands of a command: `bench paper`, `simulate sweep`."""
