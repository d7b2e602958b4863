"""Where records live. Every backend passes the same contract suite."""
