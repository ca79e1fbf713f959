"""What a load needs of its node, by the files of its model and the settings of now."""

from localai_cluster import conf
from nodes.definitions.files import Definition, load_options
from nodes.definitions.sizes import ModelFiles
from nodes.placement import estimate
from nodes.placement.choose import Need


def of(definition: Definition, files: ModelFiles) -> Need:
    """R2.40, R2.37; whether lack of it keeps a node out is the operator's to say (R2.32, R2.39)."""
    settings, options = conf.cluster(), load_options(definition)
    return Need(
        vram=estimate.vram(files.weights, files.header, options),
        vram_required=settings.vram_policy == "require",
        disk=estimate.disk(files.payload),
        disk_required=settings.disk_headroom_check,
        own_gpus=bool(options.get("MainGPU") or options.get("TensorSplit")),
    )
