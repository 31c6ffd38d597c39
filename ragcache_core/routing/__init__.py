"""Which replica of a fleet gets a request; no clock and no socket, so that a simulated fleet chooses alike."""
