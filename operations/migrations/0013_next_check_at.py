from django.db import migrations


class Migration(migrations.Migration):
    """A target's next check, in the words of the field."""

    dependencies = [("operations", "0012_one_active_a_kind")]

    operations = [migrations.RenameField("operationtarget", "next_look_at", "next_check_at")]
