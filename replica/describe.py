"""What the options of a run come to, in lines."""

from dataclasses import asdict

from replica.data import Sizes
from replica.options import AllreduceOptions, Options, ServerOptions


def replicas(
    opts: AllreduceOptions,
    sizes: Sizes,
    size: int,
    replicas: int,
    batches: int,
    rate: float,
) -> list[str]:
    """train.py's run of ``replicas`` replicas.

    Args:
        opts: its options.
        sizes: of the data set.
        size: of the parameters' vector.
        replicas: how many there are.
        batches: how many one update averages.
        rate: the learning rate in use.
    """
    batch = batches * opts.batch_size
    return _both(
        opts,
        sizes,
        size,
        f"replicas: {replicas}, each {opts.batch_size} samples x "
        f"{batches // replicas} per update; global batch {batch}, "
        f"{sizes.train / batch:.2f} updates per epoch, "
        f"about {sizes.train / replicas:.0f} samples per replica and epoch",
        f"learning rate: {rate:g} (--learning_rate {opts.learning_rate:g}, "
        f"--lr_scaling {opts.lr_scaling}, batches per update: {batches})",
    )


def workers(opts: ServerOptions, sizes: Sizes, size: int, workers: int) -> list[str]:
    """ps_mode.py's run of ``workers`` workers, on parameters [size]."""
    batch = opts.push_every * opts.batch_size
    if opts.sync_replicas:
        wanted = opts.replicas_to_aggregate or workers
        how = f"the first {wanted} gradients of a version are averaged"
        batch *= wanted
    elif opts.max_staleness is None:
        how = "each gradient is applied on arrival"
    else:
        how = f"no worker is more than {opts.max_staleness} updates ahead"
    scaled = " / (1 + staleness)" if opts.rate(1) < opts.learning_rate else ""
    return _both(
        opts,
        sizes,
        size,
        f"servers: {opts.num_ps}; workers: {workers}, each {opts.batch_size} "
        f"samples x {opts.push_every} per gradient; {how}; an update takes "
        f"{batch} samples, {sizes.train / batch:.2f} updates per epoch",
        f"learning rate: {opts.learning_rate:g}{scaled}",
    )


def _both(opts: Options, sizes: Sizes, size: int, *how: str) -> list[str]:
    told = {k: v for k, v in asdict(opts).items() if k != "mirrors"}
    return [
        f"data: {sizes.source}: {sizes.train} training, {sizes.validation} "
        f"validation, {sizes.test} test samples",
        f"model: {opts.hidden_units} hidden units, {size} parameters, seed {opts.seed}",
        *how,
        f"options: {' '.join(f'{k}={v}' for k, v in told.items())}",
    ]
