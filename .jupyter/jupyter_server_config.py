"""For every Jupyter server of this environment: what the kernel says reaches the browser at once.

Jupyter leaves Nagle's algorithm on: a message waits until the browser has confirmed the one before it, which it may do
40 ms late, and a slider feels sticky.
"""

from jupyter_server.services.kernels.connection.channels import ZMQChannelsWebsocketConnection


class PromptConnection(ZMQChannelsWebsocketConnection):
    """A kernel's connection to the browser, with TCP_NODELAY."""

    def connect(self):
        self.websocket_handler.set_nodelay(True)
        return super().connect()


c = get_config()  # noqa: F821, Jupyter's own
c.ServerApp.kernel_websocket_connection_class = PromptConnection
