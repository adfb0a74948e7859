"""DistFlow: tensors from any memory of a cluster to any other (DeepServe 4.4, xDeepServe 5.1).

spans         raw addresses, and how two lists of them are paired: no I/O
rules         the two sides of a transfer as tables: no I/O
transfer      one side of a transfer, and the messages between the two
backends      what carries the bytes: UB memory copy, RoCE, VPC
send_receive  on UB, too: XCCL's send and receive
channels      the rings and fields that these share
link_probe    whether a link is at fault, or who is beyond it
transport     what all endpoints share: the backend, deadlines, spans in use, inboxes
endpoint      a group of nodes, which may be a source, a destination or both
flow          link_cluster, transfer
"""

from xdeepserve.comm.distflow.backends import Backend, backend_between
from xdeepserve.comm.distflow.endpoint import Endpoint
from xdeepserve.comm.distflow.flow import DistFlow
from xdeepserve.comm.distflow.spans import Span, pair
from xdeepserve.comm.distflow.transfer import Completion

__all__ = ["Backend", "Completion", "DistFlow", "Endpoint", "Span", "backend_between", "pair"]
