"""Index backends: where records live. Every backend passes the same contract suite."""
