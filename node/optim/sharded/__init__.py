"""The same optimizer over the devices of one peer."""
