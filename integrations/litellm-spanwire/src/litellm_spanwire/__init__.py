"""LiteLLM's custom provider ``spanwire``: models named ``spanwire/<model>`` are called over spanwire.

::

    import litellm, litellm_spanwire

    litellm_spanwire.register()
    litellm.completion("spanwire/my-model", messages, api_base="http://127.0.0.1:8000/v1", api_key="...")

The proxy needs no code: its configuration names :data:`handler`.

.. code-block:: yaml

    litellm_settings:
      custom_provider_map:
        - {provider: spanwire, custom_handler: litellm_spanwire.handler}
"""

from .provider import PROVIDER, SpanwireLLM, handler, register
from .reports import report

__all__ = ["PROVIDER", "SpanwireLLM", "handler", "register", "report"]
