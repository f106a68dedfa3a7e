"""A message-passing network on complete graphs: which people stand in the same group (Bridging the Gap, table 3)."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def two_layers(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs))


class GNN(nn.Module):
    """Affinity of every pair in a frame: people [n, m, 4] (x, y, cos, sin) -> logits [n, m (m-1) / 2, outputs].

    Pairs come in the order (0,1), (0,2), ..., (m-2,m-1). Each of `rounds` rounds computes m_ij = MLP(h_i, h_j, e_ij),
    h_i <- MLP(h_i, sum_j m_ij), e_ij <- m_ij; e_ij starts as the distance. The logits of a pair come from the mean of
    e_ij and e_ji. The authors' layer sizes are not public: these are ours.
    """

    def __init__(self, shape: Sequence[int], outputs: int, dropout: float = 0.0, hidden: int = 64, rounds: int = 2):
        super().__init__()
        if len(shape) != 2:
            raise ValueError(f"model 'gnn' expects graphs [nodes, features], got samples of shape {list(shape)}")
        widths = [(shape[1], 1)] + [(hidden, hidden)] * (rounds - 1)  # of nodes and edges, into each round
        self.messages = nn.ModuleList(
            nn.Sequential(two_layers(2 * node + edge, hidden, hidden), nn.ReLU()) for node, edge in widths
        )
        self.nodes = nn.ModuleList(
            nn.Sequential(two_layers(node + hidden, hidden, hidden), nn.ReLU()) for node, _ in widths
        )
        self.dropout = nn.Dropout(dropout)
        self.readout = two_layers(hidden, hidden, outputs)

    def forward(self, people: Tensor) -> Tensor:
        m = people.shape[1]
        position = people[..., :2] - people[..., :2].mean(1, keepdim=True)
        nodes = torch.cat((position, people[..., 2:]), -1)
        # The square root has no gradient at 0, the distance to oneself; positions are inputs and need none.
        edges = (position[:, :, None] - position[:, None]).square().sum(-1, keepdim=True).sqrt()
        others = 1 - torch.eye(m, device=people.device)[..., None]
        for message, update in zip(self.messages, self.nodes, strict=True):
            h_i = nodes[:, :, None].expand(-1, -1, m, -1)
            edges = message(torch.cat((h_i, h_i.transpose(1, 2), edges), -1))
            nodes = update(torch.cat((nodes, (edges * others).sum(2)), -1))
        first, second = torch.triu_indices(m, m, offset=1, device=people.device)
        pairs = (edges[:, first, second] + edges[:, second, first]) / 2
        return self.readout(self.dropout(pairs))
