"""Operations on a model own a share of it: the load that requests join the first, an unload all of them."""

from django.db import migrations

_TO_SHARES = """
UPDATE operations SET key = key || CASE kind WHEN 'model_load' THEN '#0' ELSE '#all' END
WHERE kind IN ('model_load', 'model_unload', 'model_delete') AND key = 'model:' || element
"""
_BACK = """
UPDATE operations SET key = 'model:' || element
WHERE kind IN ('model_load', 'model_unload', 'model_delete')
AND key IN ('model:' || element || '#0', 'model:' || element || '#all')
"""


class Migration(migrations.Migration):
    dependencies = [
        ("operations", "0007_process_versions"),
    ]

    operations = [migrations.RunSQL(_TO_SHARES, _BACK)]
