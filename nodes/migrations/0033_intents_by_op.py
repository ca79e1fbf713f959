"""Install, upgrade and deletion of a backend on a node are rows of their own, which run one at a time."""

from django.db import migrations, models
from django.db.models import Q

import localai_cluster.kit.clock


class Migration(migrations.Migration):
    dependencies = [
        ("nodes", "0032_file_port"),
    ]

    operations = [
        migrations.AddField(
            model_name="pendingbackendop",
            name="requested_at",
            field=models.DateTimeField(default=localai_cluster.kit.clock.now, editable=False),
        ),
        migrations.RemoveConstraint(model_name="pendingbackendop", name="intent_once"),
        migrations.AddConstraint(
            model_name="pendingbackendop",
            constraint=models.UniqueConstraint(name="intent_once", fields=("node", "backend", "op")),
        ),
        migrations.AddConstraint(
            model_name="pendingbackendop",
            constraint=models.UniqueConstraint(
                name="intent_one_at_a_time",
                fields=("node", "backend"),
                condition=Q(("lease_until__isnull", False)),
            ),
        ),
    ]
