"""Tables of figures over time in place of the memory samples; `nodes/figures` creates their partitions."""

from django.db import migrations

_CREATE = """
CREATE TABLE figure_samples (
    subject text COLLATE "C" NOT NULL, at timestamptz NOT NULL, numbers int[] NOT NULL,
    PRIMARY KEY (subject, at)
) PARTITION BY RANGE (at);
CREATE TABLE figure_hours (
    at timestamptz NOT NULL, subject text COLLATE "C" NOT NULL, body bytea NOT NULL,
    PRIMARY KEY (at, subject)
) PARTITION BY RANGE (at);
CREATE TABLE figure_days (
    at timestamptz NOT NULL, subject text COLLATE "C" NOT NULL, body bytea NOT NULL,
    PRIMARY KEY (at, subject)
) PARTITION BY RANGE (at);
-- They are compressed already.
ALTER TABLE figure_hours ALTER COLUMN body SET STORAGE EXTERNAL;
ALTER TABLE figure_days ALTER COLUMN body SET STORAGE EXTERNAL;
"""


class Migration(migrations.Migration):
    dependencies = [
        ("nodes", "0040_learned_memory"),
        ("django_q", "0018_task_success_index"),
    ]

    operations = [
        migrations.DeleteModel(name="NodeSample"),
        # The function of that schedule no longer exists.
        migrations.RunSQL(
            "DELETE FROM django_q_schedule WHERE name = 'nodes: memory samples'", migrations.RunSQL.noop
        ),
        migrations.RunSQL(_CREATE, "DROP TABLE figure_samples, figure_hours, figure_days"),
    ]
