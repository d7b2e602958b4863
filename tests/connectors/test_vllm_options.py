"""Options of the vLLM connector: what is not allowed is refused before an engine starts, and named."""

from __future__ import annotations

import pytest

from connectors.vllm.options import VllmOptions
from kvcm.model.errors import InvalidArgumentError

_NEEDED = {"manager": "a:1", "instance_group": "g", "instance_id": "i"}


def test_the_options_that_have_to_be_given_are_enough() -> None:
    options = VllmOptions.read(_NEEDED)
    assert (options.load_async, options.layerwise, options.decode_batch_blocks) == (True, False, 8)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"instance_id": ""}, "option 'instance_id' is empty"),
        ({"layerwise": True}, "option 'layerwise' is true, which needs 'load_async' to be false"),
        ({"decode_batch_blocks": 0}, "option 'decode_batch_blocks' is 0, must be > 0"),
        ({"lookup_seconds": 0.0}, "option 'lookup_seconds' is 0.0, must be > 0"),
        ({"pinned_fraction": 1.0}, "option 'pinned_fraction' is 1.0, must be > 0 and <= 0.9"),
        ({"staging_bytes": 4096}, "option 'staging_bytes' is 4096, must be at least 1048576"),
        ({"transfer_threads": -1}, "option 'transfer_threads' is -1, must be >= 0"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_not_allowed_is_refused(given: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        VllmOptions.read(_NEEDED | given)
    assert str(refused.value) == message
