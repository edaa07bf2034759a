"""The elastic core: change a model from outside with one verb, `elasticize`."""

from megatron_elastic.platform import prepare_platform

prepare_platform()
