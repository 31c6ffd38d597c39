"""An engine step by step, as vLLM schedules it: chunked prefills beside answers, blocks in use, loads ahead."""
