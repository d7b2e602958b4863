"""`kvcm gateway`: a proxy in front of engines that sends each request to the engine that serves its prompt best.

A request is read whole (`app`), its prompt is studied (`routing`: tokens from an engine, scores from the manager), a
policy chooses an engine (`policies`), and the answer is passed on as it comes (`proxy`).
"""

__all__: list[str] = []
