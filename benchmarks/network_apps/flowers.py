"""The same work with Flower's own FedAvg strategy, as its quickstart for PyTorch writes it."""

import torch
from flwr.app import ArrayRecord, MetricRecord, RecordDict
from flwr.app import Message as Answer
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from torch import nn
from work import client_examples, make_model

device = ClientApp()
server = ServerApp()  # apart, because Flower looks for the names without running the file


@device.train()
def train(message, context):
    model = make_model()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    data = client_examples(int(context.node_config["client"]))
    model.train()
    for x, y in torch.utils.data.DataLoader(data, batch_size=32, shuffle=True):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    metrics = MetricRecord({"num-examples": len(data)})
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Answer(content=content, reply_to=message)


@server.main()
def main(grid, context):
    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=context.run_config["clients"])
    arrays = ArrayRecord(make_model().state_dict())
    strategy.start(grid=grid, initial_arrays=arrays, num_rounds=context.run_config["rounds"])
    print("Run finished", flush=True)
