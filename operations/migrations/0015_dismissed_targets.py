from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("operations", "0014_failures_index")]

    operations = [
        migrations.AddField(
            model_name="operationtarget",
            name="dismissed_at",
            field=models.DateTimeField(blank=True, null=True),
        ),
    ]
