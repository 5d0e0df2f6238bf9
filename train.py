"""Synchronous data-parallel training: every rank is a replica, Horovod averages.

    python train.py                      # one process
    horovodrun -np 4 python train.py     # four replicas

Each replica holds all parameters in one flat vector and computes the gradient of its
own batch; one allreduce averages the gradients; each replica then makes the same
update to the same parameters. Lines that exist only because there is more than one
process are marked `# all ranks:` or `# rank 0:`.
"""

import hashlib
import time
from dataclasses import dataclass

import numpy as np

from replica import (
    JobError,
    data,
    describe,
    fetch,
    optimizer,
    options,
    params,
    placement,
    policy,
    report,
)

# Imported by connect(), once the flags are read and the cores are chosen.
hvd = tf = model = None

# Steps of the loop in the graph before Python looks up: as many as take about
# CALL_SECONDS, so that large networks too are reported and stopped in time.
MOST_STEPS, CALL_SECONDS = 50, 0.5
EVALUATION_BATCH = 2500  # samples, so that a large set needs no large memory


@dataclass(frozen=True)
class State:
    """Parameters and the optimizer's slots, by name: float32 variables [size]."""

    vector: "tf.Variable"
    slots: dict[str, "tf.Variable"]

    def variables(self) -> list["tf.Variable"]:
        """All of them, in one order."""
        return [self.vector, *self.slots.values()]


def main(argv: list[str] | None = None) -> None:
    """Train as ``argv`` (default: the command line) says, and report."""
    opts = options.parse(argv, options.AllreduceOptions)
    here = placement.slot()
    opts.check_straggler(range(here.size))
    # all ranks: cores, threads and GPU by local rank, before anything else starts
    placed = placement.settle(opts.num_gpus, opts.stall_timeout)
    # all ranks: the first rank of each host fetches, the others wait for the files
    fetch.mnist(opts.data_dir, opts.mirrors.split(","), here.local_rank == 0)
    if opts.download_only:
        report.say(f"data: {opts.data_dir} is complete")
        return
    dataset = data.load(opts.data_dir, opts.num_classes)
    # all ranks: a frozen rank stops Horovod too, which then cannot tell of the stall
    watchdog = report.Watchdog(opts.stall_timeout, opts.PROG)
    placed += connect(opts, dataset)
    watchdog.beat("all ranks met")
    for line in placed:
        report.say(line)
    _, summary = train(opts, dataset, watchdog)
    report.final(summary)
    # all ranks: leave together, as long as the watchdog looks on; the shutdown alone
    # would take a rank with it that has not come here
    hvd.join()
    hvd.shutdown()


def connect(opts: options.AllreduceOptions, dataset: data.Dataset) -> list[str]:
    """Import TensorFlow and Horovod, and meet the other ranks.

    Returns lines about what was found.
    """
    global hvd, tf, model
    try:
        with report.quiet_stderr():
            import horovod.tensorflow as hvd
            import tensorflow as tf

            from replica import model
    except Exception as error:
        raise JobError(
            "Horovod does not work with the TensorFlow that is installed "
            f"({type(error).__name__}: {error}); run ./install.sh".replace("\n", " ")
        ) from error
    if opts.deterministic:
        tf.config.experimental.enable_op_determinism()
    hvd.init()
    # all ranks: a rank with other options or data would train something else, or hang
    mine = opts.identity() | dataset.sizes.content()
    if found := report.disagreement(hvd.allgather_object(mine)):
        raise JobError(found)
    return placement.missing_gpus(hvd.allgather_object(model.gpu_is_missing()))


def train(
    opts: options.AllreduceOptions, dataset: data.Dataset, watchdog: report.Watchdog
) -> tuple[np.ndarray, dict]:
    """Train on every rank; returns the parameters [size] and the final report."""
    ranks, rank = hvd.size(), hvd.rank()
    passes = opts.passes_per_update(ranks)
    batches = ranks * passes  # averaged by one update
    opts.check_samples(len(dataset.train), ranks, batches)
    rate = policy.batch_scaled_rate(opts.learning_rate, opts.lr_scaling, batches)
    layout = params.mlp(opts.hidden_units, opts.num_classes)
    for line in describe.replicas(
        opts, dataset.sizes, layout.size, ranks, batches, rate
    ):
        report.say(line)

    # rank 0: draws the initial values, which the broadcast brings to the others
    first = layout.initial(opts.seed) if rank == 0 else np.zeros(layout.size, "f4")
    slots = optimizer.create(opts.optimizer, layout.size, opts.momentum).slots
    state = State(tf.Variable(first), {n: tf.Variable(v) for n, v in slots.items()})
    # all ranks: start from the parameters and the optimizer state of rank 0
    for variable in state.variables():
        variable.assign(hvd.broadcast(variable, root_rank=0))
    check_equal(state, "at the start")
    untrained = state.vector.numpy().copy()  # or it might be the variable's memory

    loop = build_loop(opts, layout, dataset.train, state, passes, rate)
    evaluate = build_evaluation(layout, state)
    sampler = data.Sampler(len(dataset.train), opts.batch_size, opts.seed)
    loop(np.zeros((0, passes, opts.batch_size), np.int32), 0)  # compile, do no step

    step, seconds, stop = 0, 0.0, False
    per_call = 1
    watchdog.beat("the loop was compiled")
    bar = report.progress(opts.train_steps, "step")
    while step < opts.train_steps and not stop:
        next_evaluation = opts.next_evaluation(step)
        while step < next_evaluation:
            steps = min(per_call, next_evaluation - step)
            # all ranks: of the tickets of a step, rank r takes r, r + ranks, ...
            tickets = range(step * batches + rank, (step + steps) * batches, ranks)
            indices = sampler.batches(tickets).reshape(steps, passes, opts.batch_size)
            began = time.perf_counter()
            losses = loop(indices, step).numpy()
            elapsed = time.perf_counter() - began
            refuse_non_finite(losses, step)
            step, seconds = step + steps, seconds + elapsed
            fast = elapsed < CALL_SECONDS
            per_call = min(2 * per_call, MOST_STEPS) if fast else max(per_call // 2, 1)
            watchdog.beat(f"step {step}")
            bar.update(steps)
        validation = evaluate(dataset.validation)
        watchdog.beat(f"the evaluation at step {step}")
        report.say(
            f"step {step}: train loss {losses[-1]:.4f}, validation loss "
            f"{validation.loss:.4f}, accuracy {100 * validation.accuracy:.2f} %, "
            f"{step / seconds:.0f} steps/s"
        )
        reached = validation.accuracy >= (opts.target_accuracy or np.inf)
        # all ranks: rank 0 decides, so that none goes on alone
        stop = bool(hvd.broadcast(tf.constant(reached), root_rank=0))
    bar.close()
    check_equal(state, "at the end")
    trained = state.vector.numpy()
    if np.array_equal(trained, untrained):
        raise JobError(f"expected {step} steps to change the parameters, found none")
    test = evaluate(dataset.test)
    watchdog.beat("the test")
    return trained, {
        "mode": "allreduce",
        "ranks": ranks,
        "workers": ranks,
        "steps": step,
        "seconds": round(seconds, 3),
        "steps_per_second": round(step / seconds, 1),
        "examples_per_second": round(step * batches * opts.batch_size / seconds, 1),
        "learning_rate": rate,
        "straggler": opts.straggler and opts.straggler._asdict(),
        "train_loss": float(losses[-1]),
        "validation_loss": validation.loss,
        "validation_loss_sum": validation.loss_sum,
        "validation_accuracy": validation.accuracy,
        "test_loss": test.loss,
        "test_accuracy": test.accuracy,
        "parameters_sha256": fingerprint([state.vector]).hex(),
    }


def build_loop(opts, layout, samples: data.Split, state: State, passes: int, rate):
    """The training loop in the graph: a function (indices, step) -> losses.

    It makes one update for each row of ``indices``, int32 [steps, passes, batch], the
    first as global step ``step`` + 1, and returns the mean loss over all replicas
    before each, float32 [steps].
    """
    images, labels = tf.constant(samples.images), tf.constant(samples.labels)
    compression = getattr(hvd.Compression, opts.compression)
    delay = opts.delay(hvd.rank())

    def late(loss):
        """``loss``, after --straggler's wait."""
        time.sleep(delay)
        return loss

    def average(total):
        """The mean of ``total`` [size + 1] over the passes, then over the replicas."""
        if passes > 1:
            total /= passes
        if delay:
            waited = tf.numpy_function(late, [total[-1]], tf.float32)
            with tf.control_dependencies([waited]):
                total = tf.identity(total)
        if hvd.size() == 1:
            return total
        # all ranks: gradient and loss in one message
        return hvd.allreduce(
            total, op=hvd.Average, compression=compression, name="gradient"
        )

    @tf.function(
        input_signature=[
            tf.TensorSpec([None, passes, opts.batch_size], tf.int32),
            tf.TensorSpec([], tf.int32),
        ]
    )
    def loop(indices, step):
        # Gathered for all steps at once: nothing but the step itself is in the loop.
        x, y = tf.gather(images, indices), tf.gather(labels, indices)
        steps = tf.shape(indices)[0]
        losses = tf.TensorArray(tf.float32, steps)
        for i in tf.range(steps):
            total = model.gradient_and_loss(layout, state.vector, x[i, 0], y[i, 0])
            for j in tf.range(1, passes):
                total += model.gradient_and_loss(layout, state.vector, x[i, j], y[i, j])
            total = average(total)
            gradient, loss = total[:-1], total[-1]
            if opts.clip_norm:
                gradient = tf.clip_by_norm(gradient, opts.clip_norm)
            update(state, gradient, step + i + 1, rate, opts.momentum)
            losses = losses.write(i, loss)
        return losses.stack()

    return loop


def update(state: State, gradient, step, rate: float, momentum: float = 0.0) -> None:
    """Make update number ``step``, from 1 on, with ``gradient`` [size]: a fused kernel.

    Which one, the slots tell: Adam (Kingma and Ba, "Adam: A Method for Stochastic
    Optimization", 2015) or gradient descent with Polyak's momentum, or without.
    """
    var, *slots = [variable.handle for variable in state.variables()]
    if "adam_mean" in state.slots:
        step = tf.cast(step, tf.float32)
        tf.raw_ops.ResourceApplyAdam(
            var=var,
            m=slots[0],
            v=slots[1],
            beta1_power=tf.pow(optimizer.BETA1, step),
            beta2_power=tf.pow(optimizer.BETA2, step),
            lr=rate,
            beta1=optimizer.BETA1,
            beta2=optimizer.BETA2,
            epsilon=optimizer.EPSILON,
            grad=gradient,
        )
    elif slots:
        tf.raw_ops.ResourceApplyMomentum(
            var=var, accum=slots[0], lr=rate, grad=gradient, momentum=momentum
        )
    else:
        tf.raw_ops.ResourceApplyGradientDescent(var=var, alpha=rate, delta=gradient)


def build_evaluation(layout, state: State):
    """A function that evaluates the parameters on a data.Split, all ranks together."""

    @tf.function(
        input_signature=[
            tf.TensorSpec([None, layout.shapes["hid_w"][0]], tf.uint8),
            tf.TensorSpec([None], tf.uint8),
        ]
    )
    def sums(images, labels):
        return model.evaluate(layout, state.vector, images, labels)

    def evaluate(samples: data.Split) -> report.Evaluation:
        total = tf.zeros(3, tf.float64)
        # all ranks: each takes every ranks-th sample; sums are added, then divided once
        share = samples[hvd.rank() :: hvd.size()]
        for first in range(0, len(share), EVALUATION_BATCH):
            part = share[first : first + EVALUATION_BATCH]
            total += sums(part.images, part.labels)
        total = hvd.allreduce(total, op=hvd.Sum, name="evaluation")
        return report.Evaluation(*total.numpy().tolist())

    return evaluate


def refuse_non_finite(losses: np.ndarray, step: int) -> None:
    """Stop at a loss that is no number; all ranks see the same averaged losses."""
    bad = np.flatnonzero(~np.isfinite(losses))
    if bad.size:
        raise JobError(
            f"step {step + bad[0] + 1}: expected a finite loss, found "
            f"{losses[bad[0]]}; training has diverged, on one replica at least"
        )


def fingerprint(variables) -> bytes:
    """SHA-256 of the variables' bytes."""
    digest = hashlib.sha256()
    for variable in variables:
        digest.update(variable.numpy().tobytes())
    return digest.digest()


def check_equal(state: State, when: str) -> None:
    """Refuse to go on if parameters or optimizer state differ between ranks."""
    mine = np.frombuffer(fingerprint(state.variables()), np.uint8)
    # all ranks: compare the digests of all
    digests = hvd.allgather(tf.constant(mine[np.newaxis]), name="digest").numpy()
    different = np.flatnonzero((digests != digests[0]).any(axis=1)).tolist()
    if different:
        raise JobError(
            f"{when} parameters or optimizer state differ from those of rank 0 on "
            f"ranks {different}"
        )


if __name__ == "__main__":
    report.run(main, "train.py")
