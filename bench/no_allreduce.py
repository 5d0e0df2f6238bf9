"""train.py without its allreduce: the rate that communication can only lower."""

import train
from replica import report


def connect(opts, dataset, connect=train.connect):
    """Meet the other ranks, then average nothing with them."""
    lines = connect(opts, dataset)
    allreduce = train.hvd.allreduce

    def nothing(tensor, name=None, **how):
        return tensor if name == "gradient" else allreduce(tensor, name=name, **how)

    train.hvd.allreduce = nothing
    return lines


train.connect = connect
train.check_equal = lambda state, when: None  # the replicas go separate ways here

if __name__ == "__main__":
    report.run(train.main, "no_allreduce.py")
