"""The only place where votes meet protobuf: `codec` writes update payloads, `validate` is the door for strangers' ones."""
