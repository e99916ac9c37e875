"""Flower's two apps: the server's, which runs a Trainer, and the device's, which answers it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from lightning_spectral.client.user_step import num_accepted
from lightning_spectral.errors import check_is, from_extra
from lightning_spectral.network.device.client_data import ClientData
from lightning_spectral.network.device.service import DeviceService, answered

with from_extra("network"):
    from flwr.app import Context, Message
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp

if TYPE_CHECKING:
    import lightning.pytorch as pl

from lightning_spectral.network.flower.app_checks import check_makes_modules, data_by_model
from lightning_spectral.network.flower.wire import NodeMemory, as_records, parts_of

Config = Mapping[str, Any]
MakeModule = Callable[[], Any]
MakeData = Callable[[Config], ClientData | Mapping[str, ClientData]]
CLIENT_NAMES = ("client", "partition-id")  # where a node's configuration may say whose data it has


def client_app(
    module: MakeModule | Mapping[str, MakeModule], client: MakeData, *, accelerator: str = "auto"
) -> ClientApp:
    """Make the app that a device runs.

    Args:
        module: Your LightningModule's class, or a function that makes the module; with several models, one for each
            name. It must be the one that the server trains.
        client: Returns the device's own data, `ClientData`, or that of each model by name. It is called with the
            configuration of the run and of the node: ``--node-config 'client="ward 7" folder="/data"'``.
        accelerator: Where a device trains, as for a Trainer: ``"cpu"``, ``"gpu"``, or by default what it has.

    Note:
        A device is known by the entry ``client`` of its node's configuration, or ``partition-id``, or by the number
        that Flower gives it, which changes when it is switched off and on.
    """
    app, services = ClientApp(), dict[int, DeviceService]()
    modules = module if isinstance(module, Mapping) else {"": module}
    check_makes_modules(modules)

    def service(context: Context) -> DeviceService:
        if context.node_id not in services:
            config = {**context.run_config, **context.node_config}
            data = data_by_model(client, config)
            who = next((str(config[name]) for name in CLIENT_NAMES if name in config), str(context.node_id))
            trusted = _packages(client, *modules.values())
            services[context.node_id] = DeviceService(modules, data, who, trusted, accelerator)
        return services[context.node_id]

    def answer(message: Message, context: Context) -> Message:
        kind, memory = message.metadata.message_type, NodeMemory(context.state)
        parts = answered(lambda: service(context).answer(kind, parts_of(message.content), memory))
        return Message(as_records(parts), reply_to=message)

    app.query()(answer)
    app.train()(answer)
    app.evaluate()(answer)
    return app


def server_app(
    federation: Callable[[Config], Any],
    trainer: Callable[[Config], pl.Trainer],
    *,
    val: Any = None,
    test: Any = None,
    **options: Any,
) -> ServerApp:
    """Make the app that the server runs: a Trainer's fit, on the clients that the network reaches.

    Args:
        federation: Returns the `FederatedModule` or `MultiModelModule`, as a simulation would fit it. It is called with
            the run's configuration, ``flwr run --run-config``.
        trainer: Returns the Trainer, likewise.
        val: Validation data at the server, or a function that makes it; with several models, one for each name.
        test: Test data, likewise; it is evaluated after the last round.
        **options: Further arguments of `RemoteClients`: ``wait_for``, ``patience``, ``deadline``, ``at_once``,
            ``eval_batch_size``.

    Note:
        ``flwr run --run-config 'resume="path.ckpt"'`` goes on from a checkpoint.
    """

    def main(grid: Grid, context: Context) -> None:
        from lightning.pytorch import Trainer

        from lightning_spectral.network.flower.flower_line import FlowerLine
        from lightning_spectral.network.server.remote_clients import clients_of_models
        from lightning_spectral.plugin.module import FederatedModule
        from lightning_spectral.plugin.several import MultiModelModule

        config = dict(context.run_config)
        model = federation(config)
        if not isinstance(model, FederatedModule | MultiModelModule):
            check_is("federation(config)", model, FederatedModule)
        data = clients_of_models(model, FlowerLine(grid), _made(val, config), _made(test, config), options)
        runner = trainer(config)
        check_is("trainer(config)", runner, Trainer)
        runner.fit(model, datamodule=data, ckpt_path=config.get("resume") or None)
        if test is not None:
            runner.test(model, datamodule=data)

    app = ServerApp()
    app.main()(main)
    return app


def _made(data: Any, config: Config) -> Any:
    """Evaluation data, or what a function or class makes of the configuration."""
    if not callable(data) or (hasattr(data, "__getitem__") and not isinstance(data, type)):
        return data
    return data(*(config,)[: num_accepted(data, 1)])


def _packages(*functions: Callable[..., Any]) -> set[str]:
    """The packages in which a user's own code lies."""
    return {function.__module__.partition(".")[0] for function in functions if hasattr(function, "__module__")}
