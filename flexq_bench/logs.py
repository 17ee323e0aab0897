"""Log lines: for people, or one JSON object each with the run, job and worker they are about."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Any

CONTEXT = ("run", "job", "worker")


class JsonFormatter(logging.Formatter):
    """Formats records as JSON: time (ISO 8601, UTC), level, logger, message, run, job, worker."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name in CONTEXT:
            value = getattr(record, name, None)
            if value is not None:
                line[name] = value
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)
