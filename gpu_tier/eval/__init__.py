"""Honest evaluation without downloads: generators, quality, hit rates, roofline and plans."""
