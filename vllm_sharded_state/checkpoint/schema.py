"""The manifest's JSON schema, from the same declarations that reading validates."""

import msgspec

from .manifest import Checksum, Manifest


def schema() -> bytes:
    """The schema (draft 2020-12) of `sharded_state.json`, as the bytes of a file.

    It says what has which form. That the parts agree with each other, that the checksum fits, and that
    there is no other spelling is for a reader to check.
    """
    (whole, checksum), definitions = msgspec.json.schema_components(
        [Manifest, Checksum], ref_template="#/$defs/{name}"
    )
    body = definitions.pop("Manifest")
    assert whole == {"$ref": "#/$defs/Manifest"}
    result = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **body,
        "title": "sharded_state.json",
        "properties": {"checksum": checksum, **body["properties"]},
        # All are written; the records below leave out what is at its default.
        "required": ["checksum", *body["properties"]],
        "$defs": {name: definitions[name] for name in sorted(definitions)},
    }
    return msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n"
