from decimal import Decimal

import django.db.models.expressions
import django.db.models.functions.comparison
import django.db.models.functions.math
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("nodes", "0044_unreached_sources"),
    ]

    operations = [
        migrations.AddField(
            model_name="backendnode",
            name="disk_quota",
            field=models.CharField(blank=True, db_default="", default="", max_length=32),
        ),
        migrations.AddField(
            model_name="backendnode",
            name="disk_quota_share",
            field=models.DecimalField(
                db_default=Decimal("0"),
                decimal_places=12,
                default=Decimal("0"),
                editable=False,
                max_digits=13,
            ),
        ),
        migrations.AddField(
            model_name="backendnode",
            name="disk_quota_size",
            field=models.BigIntegerField(db_default=0, default=0, editable=False),
        ),
        migrations.AddField(
            model_name="nodemodel",
            name="files_needed",
            field=models.BigIntegerField(db_default=0, default=0),
        ),
        migrations.AddConstraint(
            model_name="backendnode",
            constraint=models.CheckConstraint(
                condition=models.Q(
                    ("disk_quota_share__gte", 0), ("disk_quota_share__lte", 1), ("disk_quota_size__gte", 0)
                ),
                name="node_disk_quota",
            ),
        ),
        migrations.AddConstraint(
            model_name="nodemodel",
            constraint=models.CheckConstraint(
                condition=models.Q(("files_needed__gte", 0)), name="replica_files_not_negative"
            ),
        ),
        migrations.AddField(
            model_name="backendnode",
            name="disk_quota_bytes",
            field=models.GeneratedField(
                db_persist=True,
                expression=models.Case(
                    models.When(
                        disk_quota_share__gt=0,
                        then=django.db.models.functions.comparison.Cast(
                            django.db.models.functions.math.Floor(
                                django.db.models.expressions.CombinedExpression(
                                    models.F("total_disk"), "*", models.F("disk_quota_share")
                                )
                            ),
                            models.BigIntegerField(),
                        ),
                    ),
                    default=models.F("disk_quota_size"),
                    output_field=models.BigIntegerField(),
                ),
                output_field=models.BigIntegerField(),
            ),
        ),
    ]
