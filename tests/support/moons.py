"""Three documents about the solar system, and two near questions about one of them."""

TEXTS = {
    "ganymede": "Ganymede is the largest moon of Jupiter, larger than the planet Mercury.",
    "titan": "Titan is a moon of Saturn with seas of methane and a thick orange sky.",
    "ceres": "Ceres is the largest body between Mars and Jupiter, found by Giuseppe Piazzi.",
}
QUESTION = "Which moon has seas of methane?"
NEAR = "Which moon has the seas of methane?"
