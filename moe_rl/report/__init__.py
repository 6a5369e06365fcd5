"""`moe-rl report`: one self-contained HTML page of one run, or of several compared."""
