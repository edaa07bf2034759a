"""The elastic core: change a model from outside with one verb, `elasticize`."""
