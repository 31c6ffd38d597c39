"""The shared tier below vLLM's offloading: a store that several engines read and write."""
