"""The project's own tree, policies, queue and orders in virtual time: traces in, hit rates and times out."""
