"""The decode engine behind the interface of OpenAI's API: `flexq-bench serve-model`."""
