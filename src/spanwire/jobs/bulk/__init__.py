"""Many calls as jobs: ``manager.submit_many``. See ``docs/bulk.md``."""

from .bulk import Bulk, BulkCounts, BulkResult
from .rows import JSONLFile

__all__ = ["Bulk", "BulkCounts", "BulkResult", "JSONLFile"]
