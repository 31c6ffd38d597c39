"""Reports of simulations and benchmarks: tables for a terminal, pages, plots."""
